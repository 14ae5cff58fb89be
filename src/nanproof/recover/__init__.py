"""After a bad step was refused and explained: what lets the run go on. `remedies` are the fixes a run can live with, `heal`
applies them and takes them back where they do not hold."""

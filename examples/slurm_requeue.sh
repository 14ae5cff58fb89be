#!/bin/bash
#SBATCH --job-name=preemptible
#SBATCH --time=04:00:00
#SBATCH --requeue                   # the job may go back to the queue
#SBATCH --open-mode=append          # and its log goes on where it was
#SBATCH --signal=USR1@120           # srun's tasks get SIGUSR1 two minutes before the time limit; on preemption they get SIGTERM

# The run saves at its next step and ends with exit status 75 (Checkpoints(on_signal=True, exit_status=75)).
srun python examples/preemptible.py "$SCRATCH/run-$SLURM_JOB_ID"
status=$?

if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"  # the same job id: the run finds its folder again, and resumes
else
    exit "$status"
fi

"""From a bad step to a named cause: replay it, locate the birth of the trouble, match the catalogue, verify the fix.

All of it runs on failure only. Nothing here may change the run it looks at: weights, buffers, gradients, optimizer state and
random numbers are put back, and an exception inside a diagnosis becomes a sentence in the incident.
"""

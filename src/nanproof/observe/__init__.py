"""Observe: what activations, weights and attention look like while all is well, and what that says about the steps to come.

Statistics are made on the device, next to what the step does anyway, and travel to the host with its record: nothing here waits.
"""

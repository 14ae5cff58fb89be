"""The parts of the guard: small classes over tensors, none of which knows the others' owner.

Principle: on the healthy path nothing here makes the host wait for the device.
"""

"""What activations, weights and attention look like on healthy steps, and what that predicts.

- `_settings` is what the user asks for (`Observe`); `_lookout` decides which steps get a full look.
- `_activations`, `_attention` and `_weights` collect; `_sites` chooses modules; `_borrowed` stands in for torch's attention.
- `_tables` holds statistics on the device; `_kernels` computes them in one pass.
- `_forecast` predicts trouble from `_trend` lines and `_early` signs.

Statistics are computed on the device and travel to the host with the step's record. Nothing here waits.
"""

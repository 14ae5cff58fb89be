"""Bundle: the folder that lets a bad step be replayed anywhere. `docs/format.md` specifies it.

- `_bundle` writes one and `_unbundle` reads it back; `_shelf` keeps the folder they are stored in.
- `_pack` turns any batch into strict JSON plus named tensors; `_facts` does so for mode, random state and optimizer.
- `_restore` puts the contents into a model and an optimizer that were built again.
"""

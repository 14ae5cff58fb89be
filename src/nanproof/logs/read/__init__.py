"""Log files of every format, as points and notes.

- `_sources` finds the logs that the user named and picks a reader; `_files` reads their bytes in bounded pieces.
- `_documents` (JSON), `_tables` (JSON lines, CSV), `_tensorboard`, `_wandb`; `_wire` decodes protocol buffers.

Plain text is in `text/`.
"""

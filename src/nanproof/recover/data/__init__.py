"""The data of a run: loaders that know their position, can be rewound, and skip quarantined samples.

- `_loaders` is what `guard.wrap` returns; `_feeds`, `_consumed` and `_streams` do one pass over each kind of data.
- `_supply` is the data as recovery sees it; `_tickets` describe a batch that was handed out.
- `_quarantine` is the file of offending samples; `_hashes` identifies a sample by its content.
- `_datasets` skips quarantined samples in your own loaders; `_generators` saves the random state behind the order.
"""

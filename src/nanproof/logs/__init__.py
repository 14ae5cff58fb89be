"""Logs that other programs wrote, read as curves, and what the curves show. No torch and no framework: text, JSON, CSV and a few
lines of protocol buffers."""

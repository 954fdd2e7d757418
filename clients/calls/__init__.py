"""A call in any dialect: its arguments, settings, retries and reply, and the interface of the dialogs that carry it."""

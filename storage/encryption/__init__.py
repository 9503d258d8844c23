"""Encryption of a store: objects in authenticated frames, the keys, and the store that encrypts.

Encryption key: the operator's, from a file, a variable or a command; it never reaches the store. Data key: the store's,
made by `init` and never changed; the store has it only encrypted, in key documents, one for each encryption key that
opens the store. Each object has a key of its own, derived from the data key and the object's place.
"""

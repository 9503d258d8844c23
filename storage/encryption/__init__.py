"""Encryption of a store: objects in authenticated frames, the keys, and the store that encrypts.

The *encryption key* is the operator's, read from a file, a variable or a command; it never reaches the store. The *data
key* is the store's: `init` creates it, and it never changes. The store contains it only in encrypted form, in *key
documents*, one for each encryption key that opens the store. Each object is encrypted with its own key, which is
derived from the data key and the object's place.
"""

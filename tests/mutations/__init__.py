"""Every value of every document in a store, changed in every way by somebody who can write there, and what follows.

`world` makes a small chain of every kind of document. `values` changes one value of one document, `sealing` seals it
again, and all documents that name its digest, so that only the rules of the documents stand against the change.
`trial` runs the commands and judges the outcome; `table` counts. `python -m tests.mutations` runs all of it.
"""

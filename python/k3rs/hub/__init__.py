"""From an empty directory to a checkpoint that is complete and right.

`download.download` makes a directory have the files of a repository of the Hugging Face Hub,
`verification.verify` compares what is there with a manifest, or with what is known of the
release.
"""

"""Folders that lie at a URL (s3://, gs://, hf://, …), with a copy on this machine."""

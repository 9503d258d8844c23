"""S3 servers of the tests, what stands between them and a client, and the policies that they enforce."""

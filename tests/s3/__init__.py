"""What stands around an S3 server in the tests: the policies that it enforces."""

"""Certificate authorities and certificates for tests, made by openssl."""

"""The `k3rs` command. It only calls the public Python API."""

"""What backends share that keep chunks as objects of a service: requests, how they fail, and the client in Rust."""

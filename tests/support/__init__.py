"""What tests share: how to start what they test, and how to make what they read."""

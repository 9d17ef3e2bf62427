"""What code a run enters, and what that code names."""

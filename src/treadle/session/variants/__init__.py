"""Which compiled variant serves a call, and what each of them depends on."""

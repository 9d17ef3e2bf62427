"""What costs nothing to find: equal values, unread ones, operations that do nothing."""

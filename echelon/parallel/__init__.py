"""What a rank does for a Plan."""

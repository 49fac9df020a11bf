"""What methods that learn share."""

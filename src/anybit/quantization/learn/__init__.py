"""Building blocks of the methods that learn by gradient descent."""

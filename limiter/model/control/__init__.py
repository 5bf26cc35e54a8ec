"""The controller's computations: samples, averages, caps, charges, mechanisms, shares and their reasons."""

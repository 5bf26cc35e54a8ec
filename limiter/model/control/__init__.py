"""What the controller computes: samples, averages, caps, charges, mechanisms, shares and their reasons."""

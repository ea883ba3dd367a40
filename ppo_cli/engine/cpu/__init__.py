"""What is only about processors: layers, products, threads and memory."""

"""Tools that every room uses: files, TLS, messages, logs, signals; it knows none of them."""

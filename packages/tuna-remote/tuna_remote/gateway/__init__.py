"""Remote workers: workers that joined by token and reach nothing but an HTTPS server."""

"""Workers that join by token: access control in Redis, what is dealt to them and collected."""

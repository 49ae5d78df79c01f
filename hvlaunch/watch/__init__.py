"""What looks on as events and actions pass, and changes nothing: the narrator for people, the recorder for programs."""

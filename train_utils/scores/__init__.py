"""How good are the detections, which files hold them, and how long do they take?"""

"""What a run says about itself: the dataset doctor, the precision audit, the HTML report.

It may import the folders from planner downwards. Start reading at doctor/, audit/ and report/.
"""

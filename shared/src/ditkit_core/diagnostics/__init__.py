"""What a run says about itself: the dataset doctor, the precision audit, the HTML report, verified
exports.

It may import the folders from run downwards. Start reading at doctor/, audit/, report/ or
verification/.
"""

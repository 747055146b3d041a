"""Files, the console, signals and the memory of this process.

It may import the folders from config downwards. Start reading at files.py and safetensors.py;
run_dir.py defines the layout of a run's folder.
"""

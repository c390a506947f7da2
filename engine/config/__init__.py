"""The settings that a person can choose: one frozen dataclass per subject.

Each field of `SamplingParams` carries its title, help, bounds and step in `field(metadata=...)`:
validation reads them, and a settings panel is built from them. Imports neither torch nor Qt.
"""

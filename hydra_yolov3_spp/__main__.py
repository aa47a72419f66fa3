"""The command ``hydra-yolov3-spp``, also ``python -m hydra_yolov3_spp``, in any folder."""

import sys

import hydra_yolov3_spp


def main() -> int:
    """Run the program that the first word of the command line names."""
    hydra_yolov3_spp.add_project()
    from conf.cli import program

    return program.start_by_word(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

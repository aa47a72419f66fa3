# Tab completion of groups, choices, keys and files in bash:   source scripts/complete.bash
# Hydra's own knows only "python train.py"; this asks it behind uv run, torchrun and python -m, too.

_complete_hydra_yolov3() {
    [[ $COMP_LINE =~ (-m +scripts\.[a-z_]+|[^ ]*(train|eval|predict|export)\.py)(.* )([^ ]*)$ ]] || return
    local program=${BASH_REMATCH[1]} before=${BASH_REMATCH[3]} word=${BASH_REMATCH[4]} python=python choices
    [[ $COMP_LINE == "uv "* ]] && python="uv run python"
    # shellcheck disable=SC2086  # both are several words
    choices=$(COMP_LINE="python program.py$before$word" $python $program -sc query=bash 2> /dev/null | tr " " "\n")
    choices=$(grep -vE "^(answers|api|build|sweeps)\b" <<< "$choices") # folders of code
    mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$word")
    [[ $word != *=* ]] || ((${#COMPREPLY[@]})) || mapfile -t COMPREPLY < <(compgen -f -P "${word%%=*}=" -- "${word#*=}")
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=/} # an option is one word
complete -o nospace -o default -F _complete_hydra_yolov3 python uv torchrun

#!/bin/sh
# Installs Tandem for you alone, without root; see --help.
set -eu

id=org.tandem_llm.Tandem
glibc=@GLIBC@
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)

usage() {
    cat <<'TEXT'
usage: ./install.sh [--prefix FOLDER] [--uninstall]

Installs Tandem into FOLDER, by default ~/.local: the program in FOLDER/lib/tandem, the
command FOLDER/bin/tandem, and an entry in the menu of your desktop. A newer version takes
the place of an older one. To remove it: ~/.local/lib/tandem/install.sh --uninstall
Chats, settings, models and the engine lie elsewhere and are left alone by both.
TEXT
}

fail() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 1
}

# Tells whether the first version is at least the second: at_least 2.36 2.34
at_least() {
    lower=$(printf '%s\n%s\n' "$1" "$2" | sort -t . -k 1,1n -k 2,2n | head -n 1)
    [ "$lower" = "$2" ]
}

check_system() {
    machine=$(uname -m)
    [ "$(uname -s)" = Linux ] || fail "This archive is for Linux."
    program=$here/Tandem.AppDir/usr/lib/tandem/python/bin/python3
    [ -x "$program" ] || fail "This folder is incomplete. Unpack the whole archive and run install.sh there."
    found=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d ' ' -f 2) || found=
    [ -n "$found" ] || fail "Tandem needs the GNU C library $glibc or later, which this system does not use."
    at_least "$found" "$glibc" || fail "Tandem needs the GNU C library $glibc or later; this system has $found."
    "$program" -c '' 2>/dev/null || fail "This archive is for another kind of processor than $machine."
}

# Names the libraries of a desktop that this system lacks; a server may well do without a window.
note_missing_libraries() {
    plugin=$home/site/PySide6/Qt/plugins/platforms/libqxcb.so
    missing=$(ldd "$plugin" 2>/dev/null | sed -n 's/^[[:space:]]*\([^ ]*\) => not found.*/\1/p' | sort -u)
    [ -n "$missing" ] || return 0
    printf 'The window needs libraries that this system lacks. Install the packages that have:\n'
    printf '%s\n' "$missing" | sed 's/^/  /'
}

check_not_running() {
    [ -d "$home" ] || return 0
    installed=$(CDPATH='' cd -- "$home" && pwd -P)
    for link in /proc/[0-9]*/exe; do
        program=$(readlink "$link" 2>/dev/null) || continue
        case $program in
        "$installed"/*) fail "Tandem is running. Close its window first, or run: tandem --quit" ;;
        esac
    done
}

# Prints the folder in which the desktop looks for menu entries, for a program below the prefix.
menu_folder() {
    own=${XDG_DATA_HOME:-$HOME/.local/share}
    case :${XDG_DATA_DIRS:-/usr/local/share:/usr/share}: in
    *:"$prefix/share":* | *:"$prefix/share/":*) own=$prefix/share ;;
    esac
    printf '%s' "$own"
}

# Prints a path as the Exec line of a menu entry has it.
quoted() {
    # shellcheck disable=SC2016  # the dollar sign is one of those that are escaped
    printf '"%s"' "$(printf '%s' "$1" | sed 's/\\/\\\\\\\\/g; s/["`$]/\\\\&/g; s/%/%%/g')"
}

# Copies a file below the share folder and notes it for --uninstall.
put() {
    target=$share/${1#"$source_share/"}
    mkdir -p -- "${target%/*}"
    cp -- "$1" "$target"
    printf '%s\n' "$target" >>"$home/installed-files"
}

# Tells the desktop what has changed, as far as it has programs for that.
refresh() {
    for command in "update-desktop-database -q" "update-mime-database" "gtk-update-icon-cache -q -t -f"; do
        case $command in
        *desktop*) folder=$1/applications ;;
        *mime*) folder=$1/mime ;;
        *) folder=$1/icons/hicolor ;;
        esac
        # shellcheck disable=SC2086  # its options are words of their own
        [ ! -d "$folder" ] || $command "$folder" >/dev/null 2>&1 || true
    done
}

# Removes what refresh has written into folders that are empty but for it.
sweep_caches() {
    mime=$1/mime
    if rmdir -- "$mime/packages" 2>/dev/null; then
        for name in XMLnamespaces aliases generic-icons globs globs2 icons magic mime.cache subclasses treemagic types version; do
            rm -f -- "$mime/$name"
        done
        rmdir -- "$mime"/* 2>/dev/null || true
    fi
    [ -n "$(find "$1/applications" -name '*.desktop' 2>/dev/null)" ] || rm -f -- "$1/applications/mimeinfo.cache"
    [ -n "$(find "$1/icons/hicolor" -name '*.*g' 2>/dev/null)" ] || rm -f -- "$1/icons/hicolor/icon-theme.cache"
    for folder in mime applications icons/hicolor; do
        rmdir -p -- "$1/$folder" 2>/dev/null || true
    done
}

install_tandem() {
    check_system
    check_not_running
    link=$prefix/bin/tandem
    if [ -e "$link" ] || [ -L "$link" ]; then
        [ "$(readlink "$link" || true)" = ../lib/tandem/bin/tandem ] ||
            fail "$link is another program. Choose another folder with --prefix."
    fi
    source_share=$here/Tandem.AppDir/usr/share
    share=$(menu_folder)
    mkdir -p -- "$prefix/bin" "$prefix/lib" || fail "$prefix cannot be written."
    new=$prefix/lib/.tandem-new
    rm -rf -- "$new"
    trap 'rm -rf -- "$new"' EXIT
    cp -R -P -- "$here/Tandem.AppDir/usr/lib/tandem" "$new" || fail "$prefix cannot be written, or has no room."
    cp -- "$0" "$new/install.sh"
    remove_old
    mv -- "$new" "$home"
    ln -s -- ../lib/tandem/bin/tandem "$link"
    : >"$home/installed-files"
    find "$source_share" -type f | while IFS= read -r file; do put "$file"; done
    entry=$share/applications/$id.desktop
    command=$(quoted "$link" | sed 's/[&|\\]/\\&/g')
    try=$(printf '%s' "$link" | sed 's/\\/\\\\/g; s/[&|\\]/\\&/g')
    sed "s|^Exec=tandem|Exec=$command|; s|^TryExec=.*|TryExec=$try|" \
        "$source_share/applications/$id.desktop" >"$entry"
    refresh "$share"
    version=$("$link" --version)
    printf '%s is installed: look for Tandem in the menu, or run %s\n' "$version" "$link"
    case :$PATH: in
    *:"$prefix/bin":*) ;;
    *) printf 'To run it as "tandem", add %s to PATH.\n' "$prefix/bin" ;;
    esac
    note_missing_libraries
}

# Removes an installed version, if there is one, with all that install_tandem has put elsewhere.
remove_old() {
    if [ -f "$home/installed-files" ]; then
        while IFS= read -r file; do
            rm -f -- "$file"
            rmdir -p -- "${file%/*}" 2>/dev/null || true
        done <"$home/installed-files"
    fi
    rm -rf -- "$home"
    [ "$(readlink "$prefix/bin/tandem" || true)" != ../lib/tandem/bin/tandem ] || rm -- "$prefix/bin/tandem"
}

uninstall_tandem() {
    [ -d "$home" ] || fail "Tandem is not installed in $prefix."
    check_not_running
    share=$(menu_folder)
    remove_old
    [ ! -d "$share/mime" ] || mkdir -p -- "$share/mime/packages" # without it nothing is refreshed
    refresh "$share"
    sweep_caches "$share"
    rmdir -- "$prefix/bin" "$prefix/lib" 2>/dev/null || true
    printf 'Tandem is removed. Chats, settings, models and the engine are still in:\n'
    for folder in "${XDG_CONFIG_HOME:-$HOME/.config}" "${XDG_DATA_HOME:-$HOME/.local/share}" "${XDG_CACHE_HOME:-$HOME/.cache}"; do
        [ ! -d "$folder/Tandem" ] || printf '  %s\n' "$folder/Tandem"
    done
}

[ -n "${HOME:-}" ] || fail "HOME names no folder."
prefix=$HOME/.local
action=install_tandem
case $here in
*/lib/tandem) prefix=${here%/lib/tandem} ;; # the copy that was installed
esac
while [ $# -gt 0 ]; do
    case $1 in
    --prefix)
        [ $# -gt 1 ] || fail "--prefix needs a folder."
        prefix=$2
        shift
        ;;
    --prefix=*) prefix=${1#--prefix=} ;;
    --uninstall) action=uninstall_tandem ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) fail "$1 is no option; --help lists them." ;;
    esac
    shift
done
[ -n "$prefix" ] || fail "--prefix needs a folder."
case $prefix in
/*) ;;
*) prefix=$PWD/$prefix ;;
esac
prefix=${prefix%/}
case $prefix in
*'
'*) fail "The name of the folder has a line break." ;;
esac
home=$prefix/lib/tandem
"$action"

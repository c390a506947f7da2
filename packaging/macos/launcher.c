/* Contents/MacOS/Tandem: Python as python3 runs it, in a process of our own.

   So the Dock, the menu bar and files that are opened find Tandem.app. Everything is found from the
   place of the program. The person's own settings of Python do not count. sys.executable is
   Resources/python/bin/python3, which starts children. */

#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <mach-o/dyld.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

typedef int (*main_function)(int, char **);
typedef void (*name_function)(const wchar_t *);
typedef wchar_t *(*decode_function)(const char *, size_t *);

static char *FLAGS[] = {"-E", "-s", "-B", "-P", "-m", "app"};
enum { N_FLAGS = sizeof FLAGS / sizeof *FLAGS };

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "Tandem cannot start: %s (%s). Install it again.\n", what, why);
    return 1;
}

int main(int count, char **words)
{
    char place[PATH_MAX], real[PATH_MAX], home[PATH_MAX], program[PATH_MAX], library[PATH_MAX];
    uint32_t size = sizeof place;
    if (_NSGetExecutablePath(place, &size) != 0 || realpath(place, real) == NULL)
        return fail("its folder is not known", "the path is too long");
    if (snprintf(home, sizeof home, "%s/../Resources/python", dirname(real)) >= PATH_MAX - 64)
        return fail("its folder is not known", "the path is too long");
    snprintf(program, sizeof program, "%s/bin/python3", home);
    snprintf(library, sizeof library, "%s/lib/%s", home, PYTHON_LIBRARY);
    unsetenv("PYTHONHOME"); /* also for what Tandem starts */
    unsetenv("PYTHONPATH");
    setenv("PYTHONNOUSERSITE", "1", 1);
    setenv("PYTHONDONTWRITEBYTECODE", "1", 1);
    void *python = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
    if (python == NULL)
        return fail("its Python cannot be loaded", dlerror());
    main_function py_main = (main_function)dlsym(python, "Py_BytesMain");
    name_function set_name = (name_function)dlsym(python, "Py_SetProgramName");
    decode_function decode = (decode_function)dlsym(python, "Py_DecodeLocale");
    char **all = calloc(count + N_FLAGS + 1, sizeof *all);
    if (py_main == NULL || set_name == NULL || decode == NULL || all == NULL)
        return fail("its Python is incomplete", library);
    all[0] = program;
    memcpy(all + 1, FLAGS, sizeof FLAGS);
    memcpy(all + 1 + N_FLAGS, words + 1, (count - 1) * sizeof *words);
    set_name(decode(program, NULL));
    return py_main(count + N_FLAGS, all);
}

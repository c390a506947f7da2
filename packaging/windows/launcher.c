/* Tandem.exe (no console) and bin\tandem.exe: Python as python.exe runs it, in a process of our own.

   So the task bar, the firewall and the task manager show Tandem and its icon. Everything is found
   from the place of the program, which is a folder deeper if CONSOLE is defined. The person's own
   settings of Python do not count. sys.executable is python\python.exe, which starts children. */

#include <windows.h>
#include <shellapi.h>
#include <stdio.h>
#include <stdlib.h>
#include <wchar.h>

#define LONGEST 32768 /* characters of a path of Windows */

#ifdef CONSOLE
#define LEVELS 2
#else
#define LEVELS 1
#endif

typedef int (*main_function)(int, wchar_t **);
typedef void (*name_function)(const wchar_t *);

static wchar_t *FLAGS[] = {L"-E", L"-s", L"-B", L"-P", L"-m", L"app"};
enum { N_FLAGS = sizeof FLAGS / sizeof *FLAGS };

static wchar_t home[LONGEST], program[LONGEST], library[LONGEST];

static int fail(const wchar_t *what)
{
    wchar_t text[1024];
    _snwprintf(text, 1023, L"Tandem cannot start: %ls (Windows error %lu).\n\nInstall it again.", what, GetLastError());
    text[1023] = 0;
#ifdef CONSOLE
    fwprintf(stderr, L"%ls\n", text);
#else
    MessageBoxW(NULL, text, L"Tandem", MB_ICONERROR);
#endif
    return 1;
}

/* Write the folder where Python is, and return whether it has a place in the buffer. */
static int find_home(void)
{
    DWORD length = GetModuleFileNameW(NULL, home, LONGEST);
    if (length == 0 || length > LONGEST - 64)
        return 0;
    for (int level = 0; level < LEVELS; level++) {
        wchar_t *end = wcsrchr(home, L'\\');
        if (end == NULL)
            return 0;
        *end = 0;
    }
    wcscat(home, L"\\python");
    return 1;
}

static int run(void)
{
    int n_words;
    wchar_t **words = CommandLineToArgvW(GetCommandLineW(), &n_words);
    if (words == NULL || !find_home())
        return fail(L"its folder is not known");
    swprintf(program, LONGEST, L"%ls\\python.exe", home);
    swprintf(library, LONGEST, L"%ls\\%ls", home, PYTHON_LIBRARY);
    SetEnvironmentVariableW(L"PYTHONHOME", NULL); /* also for what Tandem starts */
    SetEnvironmentVariableW(L"PYTHONPATH", NULL);
    SetEnvironmentVariableW(L"PYTHONNOUSERSITE", L"1");
    SetEnvironmentVariableW(L"PYTHONDONTWRITEBYTECODE", L"1");
    SetDefaultDllDirectories(LOAD_LIBRARY_SEARCH_DEFAULT_DIRS); /* never the folder one happens to be in */
    AddDllDirectory(home); /* the runtime of Visual C++ */
    HMODULE python = LoadLibraryExW(library, NULL, LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_DEFAULT_DIRS);
    if (python == NULL)
        return fail(L"its Python cannot be loaded");
    main_function py_main = (main_function)(void *)GetProcAddress(python, "Py_Main");
    name_function set_name = (name_function)(void *)GetProcAddress(python, "Py_SetProgramName");
    wchar_t **all = calloc(n_words + N_FLAGS + 1, sizeof *all);
    if (py_main == NULL || set_name == NULL || all == NULL)
        return fail(L"its Python is incomplete");
    all[0] = program;
    memcpy(all + 1, FLAGS, sizeof FLAGS);
    memcpy(all + 1 + N_FLAGS, words + 1, (n_words - 1) * sizeof *words);
    set_name(program);
    return py_main(n_words + N_FLAGS, all);
}

#ifdef CONSOLE
int wmain(void)
{
    return run();
}
#else
int WINAPI wWinMain(HINSTANCE instance, HINSTANCE previous, PWSTR line, int show)
{
    (void)instance, (void)previous, (void)line, (void)show;
    return run();
}
#endif

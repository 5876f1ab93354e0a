/* Make one checkpoint call and exit: what a tool that is one process a call does.
 *
 *   one_call FUNCTION PID
 *
 * FUNCTION is the rest of cuCheckpointProcess...: GetState, Lock and so on.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int count, char **arguments)
{
    const char *path = getenv("CUCKPT_LIBCUDA");
    char name[64] = "cuCheckpointProcess";
    long answer[8] = {0}; /* a number, or the args: zeros */
    int (*call)(int, void *);
    void *library;
    int result;

    if (count != 3 || strlen(arguments[1]) > 40)
        return fputs("usage: one_call FUNCTION PID\n", stderr), 2;
    library = dlopen(path ? path : "libcuda.so.1", RTLD_NOW);
    if (!library)
        return fprintf(stderr, "%s\n", dlerror()), 2;
    strcat(name, arguments[1]);
    call = (int (*)(int, void *))dlsym(library, name);
    if (!call)
        return fprintf(stderr, "there is no %s\n", name), 2;
    result = call(atoi(arguments[2]), answer);
    if (result)
        fprintf(stderr, "%s returned %d\n", name, result);
    return result != 0;
}

/* Faults: what the machine is to let go wrong, and at which calls.
 *
 * They happen in the restore thread of the target, so that the others who ask
 * about it wait, as they do for what takes long by itself. A call is counted when
 * it reaches its target; the count is that of the whole machine.
 */
#define _GNU_SOURCE
#include "simulator.h"

#include <poll.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

uint64_t count_call(enum operation operation)
{
    return atomic_fetch_add(&the_machine()->calls[operation], 1) + 1;
}

/* Wait; false if this process leaves the machine, whose listener is then shut down. */
static bool wait_until(uint64_t end, int listener)
{
    struct pollfd ended = {.fd = listener};
    uint64_t now = now_ns();

    while (now < end) {
        struct timespec left = {(time_t)((end - now) / 1000000000u),
                                (long)((end - now) % 1000000000u)};

        if (ppoll(&ended, 1, end == UINT64_MAX ? NULL : &left, NULL) > 0)
            return false;
        now = now_ns();
    }
    return true;
}

static bool meets(const struct fault *fault, enum operation operation,
                  uint64_t number, enum moment when)
{
    return fault->operation == operation && fault->when == when &&
           number >= fault->at && number - fault->at < fault->count;
}

/* Let happen what is to happen at this moment of a call. */
enum fate suffer_faults(enum operation operation, uint64_t number,
                        enum moment when, int caller, int listener,
                        CUresult *result)
{
    const struct machine *machine = the_machine();
    enum fate fate = SPARED;

    for (uint32_t i = 0; i < machine->fault_count; i++) {
        /* It may give way to another one as soon as the call counts as made. */
        const struct fault fault = machine->faults[i];
        const uint64_t start = now_ns();
        const uint64_t end = fault.delay_ns > UINT64_MAX - start
                                 ? UINT64_MAX : start + fault.delay_ns;

        if (!meets(&fault, operation, number, when))
            continue;
        if (!wait_until(end, listener))
            return ENDED;
        if (fault.kill == TARGET) {
            the_machine()->finished[operation]++; /* nobody will later */
            kill(getpid(), SIGKILL);
        }
        if (fault.kill == CALLER && caller > 0)
            kill(caller, SIGKILL);
        if (fault.result >= 0) {
            *result = fault.result;
            fate = DECIDED;
        }
    }
    return fate;
}

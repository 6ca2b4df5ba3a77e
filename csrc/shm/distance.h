// How far apart the processors of two processes are.
#pragma once

#include "common/deadline.h"
#include "shm/ring.h"

namespace adaptive::shm {

// Time in ns that a line takes from one process to the other, by sending one back and forth; both
// call it at the same time with the same memory, one of them as `leader`, whose result the other
// gets. -1 where it could not be measured within some ten milliseconds, for instance because both
// share a processor.
double measure_distance_ns(Control* control, bool leader) noexcept;

}  // namespace adaptive::shm

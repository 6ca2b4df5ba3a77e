// Measures the distance between the processors of two processes.
#pragma once

#include "common/deadline.h"
#include "shm/ring.h"

namespace adaptive::shm {

// Returns the time in ns that a cache line takes from one process to the other, measured by sending
// a line back and forth. Both processes must call it at the same time with the same memory, one of
// them as `leader`. Both get the leader's result. Returns -1 if the time cannot be measured within
// tens of milliseconds, for example because both processes share a processor.
double measure_distance_ns(Control* control, bool leader) noexcept;

}  // namespace adaptive::shm

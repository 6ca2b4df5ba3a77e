// What the bindings share. Only files in this folder include Python's headers.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>

#include "common/deadline.h"
#include "common/error.h"

namespace adaptive {

// How long a wait stays away from Python's signal handlers.
constexpr auto kSlice = std::chrono::milliseconds(100);

// Throws std::invalid_argument for a time that is none.
Deadline deadline_after(double timeout_s);

// The same for a time on the clock of time.monotonic(); any that never comes is the longest.
Deadline deadline_at(double monotonic_s) noexcept;

// "0.25 s"
std::string seconds_text(double seconds);

// Throws what a handler raised. Needs the GIL.
void run_signal_handlers();

// Refuses a second thread instead of making it wait. Needs the GIL, at both ends.
class Busy {
 public:
  Busy(bool& flag, const char* what) : flag_(flag) {
    if (flag_) {
      throw std::runtime_error(std::string("two threads ") + what + " at the same time");
    }
    flag_ = true;
  }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;
  ~Busy() { flag_ = false; }

 private:
  bool& flag_;
};

// Sets Python's error to the one of megatron.adaptive.errors for a core exception; for any other
// the one that pybind11 would choose. Needs the GIL.
void set_python_error(std::exception_ptr thrown) noexcept;

// Adds `Arrival` and `Node` to the module.
void bind_transport(pybind11::module_& module);

}  // namespace adaptive

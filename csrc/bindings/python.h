// Helpers of the bindings. Only files in this folder include Python's headers.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>

#include "common/deadline.h"
#include "common/error.h"

namespace adaptive {

// Maximum time that a wait runs without calling Python's signal handlers.
constexpr auto kSlice = std::chrono::milliseconds(100);

// Returns a deadline `timeout_s` seconds from now. Throws std::invalid_argument if the time is
// invalid.
Deadline deadline_after(double timeout_s);

// Converts a time of Python's time.monotonic() to a deadline. Times that are too late for the clock
// become the latest possible deadline.
Deadline deadline_at(double monotonic_s) noexcept;

// Returns text like "0.25 s".
std::string seconds_text(double seconds);

// Throws the exception that a signal handler raised. Needs the GIL.
void run_signal_handlers();

// A guard that raises an error in a second thread instead of blocking it. The constructor and the
// destructor need the GIL.
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

// Sets a Python error for a C++ exception: the matching class of megatron.adaptive.errors for an
// exception of the core, otherwise the class that pybind11 would choose. Needs the GIL.
void set_python_error(std::exception_ptr thrown) noexcept;

// Adds `Arrival` and `Node` to the module.
void bind_transport(pybind11::module_& module);

}  // namespace adaptive

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

// Throws std::invalid_argument for an invalid time.
Deadline deadline_after(double timeout_s);

// Returns a deadline for a time of time.monotonic(). Later times become the longest deadline.
Deadline deadline_at(double monotonic_s) noexcept;

// Returns text like "0.25 s".
std::string seconds_text(double seconds);

// Throws the exception that a signal handler raised. Needs the GIL.
void run_signal_handlers();

// Raises an error for a second thread instead of blocking it. The constructor and the destructor
// need the GIL.
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

// Sets Python's error to the class of megatron.adaptive.errors that matches a core exception. For
// other exceptions, uses the class that pybind11 would choose. Needs the GIL.
void set_python_error(std::exception_ptr thrown) noexcept;

// Adds `Arrival` and `Node` to the module.
void bind_transport(pybind11::module_& module);

}  // namespace adaptive

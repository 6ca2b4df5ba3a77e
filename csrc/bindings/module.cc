// The Python module megatron.adaptive._C: decision log, descriptors, RDMA devices; the transports
// are in transport.cc. Only files in this folder include Python's headers.
//
// Blocking calls release the GIL; those that wait come back about every 100 ms so that signal
// handlers of Python run. Exceptions of the core become those of megatron.adaptive.errors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/python.h"
#include "common/deadline.h"
#include "common/error.h"
#include "common/fd_passing.h"
#include "rdma/devices.h"
#include "shm/decision_log.h"

namespace py = pybind11;

namespace adaptive {
namespace {

// Raised by one whenever Python code has to know about a change here; see extension.py.
constexpr int kInterface = 5;

// Refuses a second thread instead of making it wait: each end of a log belongs to one.
class OneThread {
 public:
  explicit OneThread(std::atomic<bool>& busy) : busy_(busy) {
    if (busy_.exchange(true)) {
      throw std::runtime_error("two threads use one end of a decision log at the same time");
    }
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  ~OneThread() { busy_.store(false); }

 private:
  std::atomic<bool>& busy_;
};

// Calls wait(deadline) without the GIL, in slices. Worth avoiding where nothing has to be waited
// for: getting the GIL back from a busy thread can take milliseconds.
template <typename Wait>
WaitStatus wait_in_slices(double timeout_s, const Wait& wait) {
  const Deadline deadline = deadline_after(timeout_s);
  for (;;) {
    WaitStatus status;
    {
      const py::gil_scoped_release release;
      status = wait(deadline.at_most(kSlice));
    }
    if (status != WaitStatus::kNotYet || deadline.expired()) {
      return status;
    }
    run_signal_handlers();
  }
}

[[noreturn]] void throw_ended(WaitStatus status, const DecisionLog& log) {
  if (status == WaitStatus::kAborted) {
    throw Error("the decision log was aborted with reason code " +
                std::to_string(log.abort_reason().value_or(0)));
  }
  throw Error("the decision log is closed");
}

struct PyWriter {
  explicit PyWriter(DecisionWriter value) : log(std::move(value)) {}

  void publish(std::int64_t value, double timeout_s) {
    const OneThread guard(busy);
    WaitStatus status = log.try_publish(value);
    if (status == WaitStatus::kNotYet) {
      status = wait_in_slices(
          timeout_s, [&](const Deadline& deadline) { return log.publish(value, deadline); });
    }
    if (status == WaitStatus::kReady) {
      return;
    }
    if (status == WaitStatus::kNotYet) {
      const std::uint32_t reader = log.slowest_reader();
      throw DeadlineError(
          "decision " + std::to_string(log.published()) + " could not be published within " +
          seconds_text(timeout_s) + ": reader " + std::to_string(reader) + " is " +
          std::to_string(log.capacity()) + " decisions behind, it is stuck or gone");
    }
    throw_ended(status, log);
  }

  DecisionWriter log;
  std::atomic<bool> busy{false};
};

struct PyReader {
  explicit PyReader(DecisionReader value) : log(std::move(value)) {}

  std::int64_t next(double timeout_s) {
    const OneThread guard(busy);
    std::int64_t value = 0;
    WaitStatus status = log.try_next(value);
    if (status == WaitStatus::kNotYet) {
      status = wait_in_slices(timeout_s,
                              [&](const Deadline& deadline) { return log.next(value, deadline); });
    }
    if (status == WaitStatus::kReady) {
      return value;
    }
    if (status == WaitStatus::kNotYet) {
      throw DeadlineError("decision " + std::to_string(log.position()) + " did not reach reader " +
                          std::to_string(log.index()) + " within " + seconds_text(timeout_s) +
                          ": the leader is stuck or gone");
    }
    throw_ended(status, log);
  }

  DecisionReader log;
  std::atomic<bool> busy{false};
};

void bind_decision_log(py::module_& module) {
  py::class_<PyWriter>(module, "DecisionWriter", R"(The leader's end of a decision log.)")
      .def("publish", &PyWriter::publish, py::arg("value"), py::arg("timeout_s"),
           R"(Appends a signed 64-bit integer for every reader.

Waits only while the slowest reader is `capacity` decisions behind, without the GIL, for at most
timeout_s seconds. One thread at a time. Raises DeadlineError; TransportError when the log was
closed or aborted.)")
      .def(
          "close", [](PyWriter& self) { self.log.close(); },
          "Ends the log in order: readers still get what was published. Any thread, repeatable.")
      .def(
          "abort", [](PyWriter& self, std::uint32_t code) { self.log.abort(code); },
          py::arg("reason_code"),
          "Ends the log at once and wakes all who wait. Any thread; the first reason stays.")
      .def_property_readonly("abort_reason",
                             [](const PyWriter& self) { return self.log.abort_reason(); })
      .def_property_readonly(
          "fd", [](const PyWriter& self) { return self.log.fd(); },
          "Descriptor of the shared memory, for attach(); the writer keeps and closes it.")
      .def_property_readonly("published", [](const PyWriter& self) { return self.log.published(); })
      .def_property_readonly("num_readers",
                             [](const PyWriter& self) { return self.log.num_readers(); })
      .def_property_readonly("capacity", [](const PyWriter& self) { return self.log.capacity(); });

  py::class_<PyReader>(module, "DecisionReader", R"(A follower's end of a decision log.)")
      .def("next", &PyReader::next, py::arg("timeout_s"),
           R"(Returns the next decision, in the order of publication.

Waits without the GIL for at most timeout_s seconds. One thread at a time. Raises DeadlineError;
TransportError when the log was aborted, or closed with nothing left to read.)")
      .def(
          "abort", [](PyReader& self, std::uint32_t code) { self.log.abort(code); },
          py::arg("reason_code"),
          "Ends the log at once and wakes all who wait. Any thread; the first reason stays.")
      .def_property_readonly("abort_reason",
                             [](const PyReader& self) { return self.log.abort_reason(); })
      .def_property_readonly("index", [](const PyReader& self) { return self.log.index(); })
      .def_property_readonly("position", [](const PyReader& self) { return self.log.position(); })
      .def_property_readonly("num_readers",
                             [](const PyReader& self) { return self.log.num_readers(); })
      .def_property_readonly("capacity", [](const PyReader& self) { return self.log.capacity(); });

  py::class_<DecisionLog>(module, "DecisionLog", R"(One writer, N readers, a ring of decisions.)")
      .def_static(
          "create",
          [](std::uint32_t num_readers, std::uint32_t capacity, unsigned local_processes) {
            return std::make_unique<PyWriter>(
                DecisionWriter::create(num_readers, capacity, local_processes));
          },
          py::arg("num_readers"), py::arg("capacity"), py::arg("local_processes") = 0,
          R"(Makes a log and returns its DecisionWriter.

local_processes is how many busy processes share this node's CPUs (0: the writer and its readers);
with more of them than CPUs this process may use, waits sleep almost at once instead of spinning.
Processes pinned to a CPU each should therefore pass 1.)")
      .def_static(
          "attach",
          [](int fd, std::uint32_t reader_index, unsigned local_processes) {
            return std::make_unique<PyReader>(
                DecisionReader::attach(fd, reader_index, local_processes));
          },
          py::arg("fd"), py::arg("reader_index"), py::arg("local_processes") = 0,
          R"(Takes one reader's place in the log behind fd and returns its DecisionReader.

fd stays the caller's and may be closed afterwards. Raises TransportError when fd holds no decision
log of this version or the index is taken.)");
}

void bind_fd_passing(py::module_& module) {
  const auto tick = [] {
    const py::gil_scoped_acquire acquire;
    run_signal_handlers();
  };
  module.def(
      "send_fd",
      [tick](const std::string& socket_path, int fd, int count, double timeout_s) {
        const Deadline deadline = deadline_after(timeout_s);
        const py::gil_scoped_release release;
        send_fd(socket_path, fd, count, deadline, tick);
      },
      py::arg("socket_path"), py::arg("fd"), py::arg("count"), py::arg("timeout_s"),
      R"(Hands fd to `count` processes of the same user that call recv_fd() with the same name.

A name starting with '@' is abstract (no file); any other is a path that must not exist yet, made
with mode 0600 and removed at the end. Returns when all have confirmed. Raises DeadlineError,
TransportError.)");
  module.def(
      "recv_fd",
      [tick](const std::string& socket_path, double timeout_s) {
        const Deadline deadline = deadline_after(timeout_s);
        const py::gil_scoped_release release;
        return recv_fd(socket_path, deadline, tick).release();
      },
      py::arg("socket_path"), py::arg("timeout_s"),
      R"(Fetches the descriptor that send_fd() hands out under this name; the caller closes it.

Waits for the other side to start if need be. Raises DeadlineError, TransportError.)");
}

void bind_rdma(py::module_& module) {
  py::class_<RdmaGid>(module, "RdmaGid")
      .def_readonly("index", &RdmaGid::index)
      .def_readonly("address", &RdmaGid::address)
      .def_readonly("type", &RdmaGid::type);
  py::class_<RdmaPort>(module, "RdmaPort")
      .def_readonly("number", &RdmaPort::number)
      .def_readonly("state", &RdmaPort::state)
      .def_readonly("link_layer", &RdmaPort::link_layer)
      .def_readonly("active_mtu_bytes", &RdmaPort::active_mtu_bytes)
      .def_readonly("gids", &RdmaPort::gids);
  py::class_<RdmaDevice>(module, "RdmaDevice")
      .def_readonly("name", &RdmaDevice::name)
      .def_readonly("ports", &RdmaDevice::ports);
  module.attr("built_with_rdma") = built_with_rdma();
  module.def("rdma_devices", &list_rdma_devices, py::call_guard<py::gil_scoped_release>(),
             "Every verbs device of this node with its ports and their GIDs. Raises "
             "TransportError in a build without RDMA.");
}

// Only the core's own exceptions; pybind11 knows the others.
void translate(std::exception_ptr thrown) {
  if (!thrown) {
    return;
  }
  try {
    std::rethrow_exception(thrown);
  } catch (const Error&) {
    set_python_error(std::current_exception());
  }
}

}  // namespace
}  // namespace adaptive

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native parts of megatron.adaptive; load it through megatron.adaptive.extension.";
  module.attr("INTERFACE") = adaptive::kInterface;
  py::register_local_exception_translator(&adaptive::translate);
  adaptive::bind_decision_log(module);
  adaptive::bind_fd_passing(module);
  adaptive::bind_rdma(module);
  adaptive::bind_transport(module);
}

// Slots of a channel in the memory of the receiver's GPU.
//
//   sender                                      receiver
//   copy stream: waits for consumed[i]          exports memory and events, once
//                tensor ──copy──> slot i ──────────────────┐
//                records written[i]                        v
//   says so when that is done ── entry ──>      its stream waits for written[i]; a view of slot i
//   may use slot i again <── credit ──          says so when consumed[i], recorded on its stream
//                                               after the last use, is done
//
// The receiver's memory, and not the sender's, because then one copy does: it ends where the tensor
// is used. A slot of the sender would be read over the bus by every kernel, or copied once more.
// The receiver owns all that is exported, so one rule holds for its end: only after the sender has
// closed what it opened.
//
// Both ends tell each other only of what is done. The waits for events are then over before they
// begin and order the devices' views of memory; no stream ever waits for another process, which may
// be killed at any moment, and what is said to be there is there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/owners.h"

namespace adaptive::cuda {

// The receiver's end.
class Arena {
 public:
  Arena() = default;
  // Throws Error where the device has no room for it.
  Arena(const std::shared_ptr<const Context>& context, unsigned slots, std::size_t slot_bytes);
  Arena(Arena&&) noexcept = default;
  Arena& operator=(Arena&&) noexcept = default;

  // What the sender opens, as bytes.
  std::vector<std::uint8_t> export_all() const;

  Address slot(unsigned index) const noexcept { return memory_.get() + index * stride_; }
  const Event& written(unsigned slot) const { return written_[slot]; }
  const Event& consumed(unsigned slot) const { return consumed_[slot]; }
  const Context& context() const noexcept { return memory_.context(); }
  const std::shared_ptr<const Context>& shared_context() const noexcept {
    return memory_.shared_context();
  }
  std::size_t size_bytes() const noexcept { return size_bytes_; }

  // Leaves all of it to the end of the process.
  void leak() noexcept;

 private:
  std::size_t stride_ = 0;
  std::size_t size_bytes_ = 0;
  std::vector<Event> written_;
  std::vector<Event> consumed_;
  Memory memory_;
};

// The sender's end: what the receiver exported.
class PeerArena {
 public:
  PeerArena() = default;
  // Opens what export_all() of another process gave. Throws Error unless it has slots of this size.
  PeerArena(const std::shared_ptr<const Context>& context,
            const std::vector<std::uint8_t>& exported, unsigned slots, std::size_t slot_bytes);
  PeerArena(PeerArena&&) noexcept = default;
  PeerArena& operator=(PeerArena&&) noexcept = default;

  Address slot(unsigned index) const noexcept { return memory_.get() + index * stride_; }
  const Event& written(unsigned slot) const { return written_[slot]; }
  const Event& consumed(unsigned slot) const { return consumed_[slot]; }
  const Context& context() const noexcept { return memory_.context(); }

 private:
  std::size_t stride_ = 0;
  std::vector<Event> written_;
  std::vector<Event> consumed_;
  PeerMemory memory_;
};

}  // namespace adaptive::cuda

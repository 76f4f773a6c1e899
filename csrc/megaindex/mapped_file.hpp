// Read-only mappings of whole regular files.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace megaindex {

// A descriptor that is closed at the end of its scope.
class OpenFile {
 public:
  // O_NONBLOCK: opening a pipe without a writer must not wait.
  explicit OpenFile(const char* path)
      : descriptor_(::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~OpenFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int descriptor() const { return descriptor_; }

  // Reads a value of the file's byte order, little-endian as the processor's.
  template <class T>
  bool read_at(int64_t offset, T& value) const {
    return ::pread(descriptor_, &value, sizeof value, offset) ==
           static_cast<ssize_t>(sizeof value);
  }

 private:
  int descriptor_;
};

// A mapping that its owner unmaps; empty where the file is empty.
class MappedFile {
 public:
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(modified_, other.modified_);
    std::swap(inode_, other.inode_);
    return *this;
  }
  ~MappedFile() {
    if (data_ != nullptr) ::munmap(data_, static_cast<size_t>(size_));
  }

  // Returns false where it is not a regular file or cannot be opened or mapped.
  bool map(const OpenFile& file) {
    struct stat status;
    if (file.descriptor() < 0 || ::fstat(file.descriptor(), &status) != 0) return false;
    if (!S_ISREG(status.st_mode)) return false;
    size_ = status.st_size;
#ifdef __APPLE__
    const timespec& modified = status.st_mtimespec;
#else
    const timespec& modified = status.st_mtim;
#endif
    modified_ = modified.tv_sec * int64_t{1000000000} + modified.tv_nsec;
    inode_ = status.st_ino;
    if (size_ == 0) return true;  // the kernel refuses empty mappings
    void* address = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED,
                           file.descriptor(), 0);
    if (address == MAP_FAILED) return false;
    data_ = static_cast<unsigned char*>(address);
    return true;
  }

  unsigned char* data() const { return data_; }
  int64_t size() const { return size_; }
  // Time of the last change, in nanoseconds.
  int64_t modified() const { return modified_; }
  uint64_t inode() const { return inode_; }

 private:
  unsigned char* data_ = nullptr;
  int64_t size_ = 0;
  int64_t modified_ = 0;
  uint64_t inode_ = 0;
};

// Number and kind of the entries of an .idx, from its header.
struct PairHeader {
  uint8_t dtype_code;
  int64_t num_sequences;
  int64_t num_bounds;

  static constexpr int64_t kBytes = 34;
  int64_t pointers_offset() const { return kBytes + 4 * num_sequences; }
  int64_t bounds_offset() const { return kBytes + 12 * num_sequences; }
  int64_t modes_offset() const { return bounds_offset() + 8 * num_bounds; }
};

// Reads the header of an .idx of so many bytes; false where a rule of the format is broken.
inline bool read_pair_header(const OpenFile& file, int64_t nbytes, PairHeader& header) {
  static constexpr unsigned char kMagic[17] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0, 1};
  static_assert(sizeof kMagic == 9 + sizeof(uint64_t), "magic, and version 1");
  unsigned char raw[PairHeader::kBytes];
  if (!file.read_at(0, raw)) return false;
  for (size_t k = 0; k < sizeof kMagic; ++k) {
    if (raw[k] != kMagic[k]) return false;
  }
  const auto count = [&raw](int at) {
    uint64_t value = 0;
    for (int k = 7; k >= 0; --k) value = value << 8 | raw[at + k];
    return value;
  };
  const uint64_t sequences = count(18), bounds = count(26);
  const auto most = static_cast<uint64_t>(nbytes);  // of either, so that no sum below overflows
  if (most > uint64_t{1} << 61 || sequences > most / 12 || bounds > most / 8) return false;
  header = {raw[17], static_cast<int64_t>(sequences), static_cast<int64_t>(bounds)};
  const int64_t end = header.modes_offset();
  return nbytes == end || nbytes == end + header.num_sequences;
}

// Reads the first and the last document bound and the last sequence of a pair, which must end where
// the .bin does. Reading them costs less than the page faults of looking at a new mapping.
inline bool ends_are_sound(const OpenFile& index, const PairHeader& header, int64_t itemsize,
                           int64_t bin_nbytes) {
  if (header.num_sequences == 0 || header.num_bounds == 0) return false;
  int32_t length = 0;
  int64_t pointer_and_bound[2] = {};  // the last pointer lies before the first bound
  int64_t last_bound = 0;
  if (!index.read_at(header.pointers_offset() - 4, length) ||
      !index.read_at(header.bounds_offset() - 8, pointer_and_bound) ||
      !index.read_at(header.modes_offset() - 8, last_bound)) {
    return false;
  }
  const int64_t pointer = pointer_and_bound[0];
  return length >= 0 && pointer >= 0 && pointer <= bin_nbytes && pointer % itemsize == 0 &&
         bin_nbytes - pointer == length * itemsize && pointer_and_bound[1] == 0 &&
         last_bound == header.num_sequences;
}

}  // namespace megaindex

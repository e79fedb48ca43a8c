#include "lockstep/data/images/png_image.h"

#include <png.h>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

DataError damaged(const std::string& why) {
  return DataError({.what = concat("damaged PNG: ", why),
                    .likely = "a file that was cut off or overwritten",
                    .next = "fetch it again, or leave such samples out with --skip-bad N"});
}

// libpng's simplified interface: any colour type, depth and interlacing becomes 8-bit RGB.
class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> file) {
    image_.version = PNG_IMAGE_VERSION;
    if (png_image_begin_read_from_memory(&image_, file.data(), file.size()) == 0) throw damaged(image_.message);
    image_.format = PNG_FORMAT_RGB;
  }
  ~Reader() { png_image_free(&image_); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  ImageShape shape() const { return {3, image_.height, image_.width}; }

  void read(std::uint8_t* into) {
    const png_color black{};
    if (png_image_finish_read(&image_, &black, into, 0, nullptr) == 0) throw damaged(image_.message);
  }

 private:
  png_image image_{};
};

}  // namespace

ImageShape png_shape(std::span<const std::uint8_t> file) { return Reader(file).shape(); }

ImageView decode_png(std::span<const std::uint8_t> file, DecodeScratch& scratch) {
  Reader reader(file);
  const ImageShape shape = reader.shape();
  scratch.resize(static_cast<std::size_t>(shape.values()));
  reader.read(scratch.data());
  return interleaved(scratch.data(), shape);
}

}  // namespace lockstep

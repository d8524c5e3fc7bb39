# docker build --tag retouch .
# docker build --tag retouch:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 .
# docker run --rm --gpus all --volume "$PWD":/work --volume ~/.cache/huggingface:/root/.cache/huggingface retouch train quickstart
#
# torch's wheels contain the CUDA runtime, so both builds have the same base; the host needs NVIDIA's driver and container toolkit.
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=judge,serve,ocr,quantized
# OpenCV, which reads text for the reward `ocr`, needs these two.
RUN apt-get update && apt-get install --yes --no-install-recommends libgl1 libglib2.0-0 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/retouch
COPY . .
RUN pip install --no-cache-dir "$(grep '^torch==' constraints.txt)" --index-url "$TORCH_INDEX"
RUN pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"
WORKDIR /work
ENTRYPOINT ["retouch"]
CMD ["doctor"]
